"""REST over HTTP: application, routes, parameters, authentication, one handler file per resource.

May import: control, lifecycle, and what they may.
Begin with app.py, then routes.py; services.py is what the handlers call.
"""
