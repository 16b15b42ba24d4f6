"""What torch's compiler gets to see of a layer: operators, a handle that names it, and what is left to the graph."""
