"""Requests: checked, with their models and clusters read, and planned.

a request, planned                     plan_request
schemas of requests and responses      schemas.PlanRequest
comparisons and explanations           comparisons.ComparisonRequest, explanations.ExplanationRequest
models by name, file or factory        model_registry, model_configs, factories
errors, exit codes, problem details    errors
a configuration, priced                price_configuration
a training run, in days and price      run_cost.RunCost
"""
