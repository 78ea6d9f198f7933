"""The integer program and its solution, without graphs and layouts.

the program: sets, variables, constraints, objective    formulation
the problem that it states, and the solution            problem.Problem, .Solution
the sums that choices add to                            quantities
its solution; the least memory                          solve.solve, .least_memory
its relaxation: lower bounds                            relaxation.relax, .Relaxer
time and memory of an assignment                        step_cost.step_time_s, .peak_bytes
HiGHS and CBC                                           backends
"""
