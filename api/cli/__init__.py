"""The command line.

the commands                 main, catalogue, tradeoffs, calibration, service
their options                options.takes_job_options
plans and prices for them    requests
output and exit codes        terminal
"""
