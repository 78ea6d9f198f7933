"""Parts of a script with torch's own parallelism, which `api.frameworks.torch_script` puts together.

what each mesh axis does                     axes.axis_roles
FSDP: the modules of fully_shard             fsdp.fsdp_units
tensor parallelism: parallelize_module       styles.tensor_styles, calls.observed_calls
the loss, one step, the program              steps.Step
what is expressed, approximated or lost      rows.script_rows
code as text                                 text, names
"""
