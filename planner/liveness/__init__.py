"""What is alive when? The points of a step at which memory can peak, and the tensors alive at each.

the points at which memory can peak    peak_candidates
what is alive at each                  backward_liveness, forward_liveness
bytes at each, for the program         class_timeline.ClassTimeline
how often an op of a block runs        multiplicity.Multiplicity
what is decided together               structure.Structure, parameter_classes
"""
