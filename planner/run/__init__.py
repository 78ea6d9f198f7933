"""Planning on one mesh: lower bounds on a run, its integer program, its solution. Baselines and pins restrict it.

one run: stated, relaxed, solved    run_planner.RunPlanner
its results                         run_results.SolvedRun, .RelaxedRun
lower bounds before any program     mesh_bound, compute_bound, memory_bound
the model at any batch size         model_analysis.ModelAnalysis
baselines and pins                  baselines, pins.Pins
"""
