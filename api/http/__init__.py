"""The HTTP service: routes, authentication, limits, answers.

the application              app
the routes                   routes
the state that they share    service.Service
tokens and rate limits       auth
errors as problem details    problems
"""
