"""Peak candidates, the points of a step at which memory can peak; and the tensors that are alive at each of them.

the peak candidates                              peak_candidates
live tensors in training, and in inference       backward_liveness, forward_liveness
live bytes of a region class, by lifetime        class_timeline.ClassTimeline
how often redistributions and saves occur        multiplicity.Multiplicity
the problem without a mesh: classes and edges    structure.Structure, parameter_classes
"""
