"""The same casts, and what the packed moments of every statistic need, counted in the same launch.

tensorwise, blocks, rows    codes, scales and sums in one launch
whole_rows                  the same for rows without turned codes, from one read
sums, tensor_cores          what is counted of a tile's numbers
moments, grains             what a program leaves of it, and of its scales
errors, sampling            what is taken from a share of the rows
square_errors               errors in a launch of their own, where scales are known too late
plan                        how a tensor is cut into programs
looks, packing              where a step's sums are left, and how they become packed moments
result                      a product's moments, which nothing casts
"""
