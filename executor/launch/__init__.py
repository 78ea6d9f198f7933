"""The ranks of a program before they have a plan: they join, tell the first rank where they run, and get its answer.

the ranks and their store        program.join_program, program.start_group
the first rank's answer          exchange.PlanExchange
"""
