"""The choices of a plan: strategies and prices become a `Problem`, and its solution becomes a `Decision`.

the problem of one run                            formulate.Formulator
its solution, as strategies and stored layouts    decision.Decision
the cost of a decision, item by item              estimate.estimate
FLOPs of the model in a step                      model_flops.model_flops
the host's time to dispatch a step                host_time.host_s
FSDP groups in the problem                        fsdp_variables
uses of parameters that share a copy              parameter_copies
tensors that are saved for the backward           saved_tensors
restrictions of choices                           choice_filters
ties between equal costs                          tie_break.break_ties
"""
