"""What stays high of layers that another package converted, by that package's own switches."""
