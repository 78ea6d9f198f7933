"""Configurations of the frameworks that people launch with: read, checked against a model and a cluster, and written.

a framework by its name             registry.find_framework
what a configuration says           launch.Reading
legal, fits, how fast, what else    check.check
a plan as a configuration           export.export_plan
a plan as a torch script            torch_script.torch_script
"""
