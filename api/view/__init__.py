"""A plan as data to draw: for the page, the report and the trace.

all that the page shows of a plan    plan_view.plan_view
one step over time                   timeline.step_timeline
when stages run their passes         schedule.passes
a trace for Perfetto                 trace.chrome_trace
one self-contained HTML file         report.report_html
"""
