"""Configurations of the frameworks that people launch with: read, checked against a model and a cluster, and written.

a configuration's text   registry.find_framework, Framework.read -> `launch.Reading`
legal, fits, how fast    check.check
a plan as a framework's  export.export
"""
