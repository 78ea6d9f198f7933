"""Seconds and bytes of a parallel configuration that is given by its degrees, as Megatron or torchtitan run it.

the configuration         parallelism.ParallelSpec, implementation.Implementation
the model's dimensions    transformer.TransformerSpec
seconds of a step         step.step_time
bytes of a step           memory.step_memory
pipeline schedules        pipeline_schedules
"""
