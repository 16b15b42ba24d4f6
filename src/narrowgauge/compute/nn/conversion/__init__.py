"""Which layers of a model are converted, by which rule and to which backend: planned, done and told.

structure -> eligible, rules, rule_checks, speed_map, switches -> plan -> convert -> report
"""
