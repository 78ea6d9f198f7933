"""What does a parallel configuration cost that is given by its degrees, as Megatron or torchtitan run it?"""
