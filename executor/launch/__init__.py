"""The ranks of a program that have no plan yet: they join, say where they run, get the first rank's plan, and shard.

planned and sharded in one call  auto_parallelize.auto_parallelize
the ranks and their store        program.join_program, program.start_group
the first rank's answer          exchange.PlanExchange
"""
