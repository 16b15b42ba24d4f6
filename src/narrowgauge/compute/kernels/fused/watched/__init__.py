"""The same casts, and what the packed moments of every statistic need, counted in the same launch.

tensorwise, blocks, rows    codes, scales and sums in one launch
whole_rows                  the same for rows without turned codes, from one read
square_errors               a launch behind it, where scales are known too late for errors
sums, moments, grains        what is counted, and what a program leaves of it
errors, sampling            what is taken from a share of the rows
plan                        how a tensor is cut into programs
looks, packing              where a step's sums are left, and how they become packed moments
result                      a product's moments, which nothing casts
"""
