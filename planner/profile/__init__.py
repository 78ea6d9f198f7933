"""Profiles of ops: FLOPs, bytes read and written, and the tensors that autograd saves.

all ops of a graph                     profile.profile_graph
one op: FLOPs, bytes, saved tensors    op_profile.OpProfile
ops profiled by formula                op_formulas
"""
