"""Plans and comparisons as text and tables for the terminal.

a plan                     plan.show_plan
two plans                  diff.show_diff
why a layout               explanation.show_explanation
many plans                 tradeoffs.show_tradeoffs
a configuration's price    configuration.show_configuration
a plan's techniques        techniques.technique_lines
numbers, tables, bars      text
"""
