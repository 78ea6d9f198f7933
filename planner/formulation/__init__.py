"""What is there to choose? Prices become a `Problem`, and its solution a `Decision`.

the problem of one run                  formulate.Formulator
its solution in the plan's terms        decision.Decision
the cost of a decision, item by item    estimate.estimate
how blocks are gathered by FSDP         fsdp_variables
restrictions of choices                 choice_filters
ties, broken as a person would          tie_break.break_ties
"""
