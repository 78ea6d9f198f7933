"""Plans and comparisons as text and tables for the terminal.

a plan                     plan.show_plan
two plans                  diff.show_diff
why a layout               explanation.show_explanation
many plans                 tradeoffs.show_tradeoffs
a configuration's price    configuration.show_configuration
numbers, tables, bars      text
"""
