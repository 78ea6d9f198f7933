"""The HTTP service: routes, authentication, limits, answers.

the application              app
the routes                   routes
the state that they share    service.Service
tokens and rate limits       auth
connections, slow clients    connection, bodies, body_limit
what happens to jobs         job_news
errors as problem details    problems
"""
