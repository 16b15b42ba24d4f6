"""When a step ends, and the scales that outlive it: the clock, the table of scales, how it rolls and is saved."""
