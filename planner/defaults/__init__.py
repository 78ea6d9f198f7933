"""What a job assumes where its user says nothing: the cluster, the batch, the sequence length, the mesh of a program.

the values and why        job.with_defaults
the cluster               cluster.default_cluster
the GPUs of a process     local_devices.local_devices
the ranks of a program    ranks.current_ranks
a DeviceMesh as a mesh    device_mesh.mesh_spec_of
"""
