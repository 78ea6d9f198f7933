"""The interfaces of shardplan: the command line, the HTTP service and the client of that service.

cli/         the command line
frameworks/  configurations of training frameworks: read, checked, and written from a plan
http/        the HTTP service
jobs/        planning jobs: store, queue, workers
remote/      the client, as a planner
render/      plans as text and tables
requests/    a request is checked, its model and cluster read, and planned
view/        plans as data to draw: the page, the report, the trace
"""
