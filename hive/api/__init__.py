"""REST over HTTP: application, routes, parameters, authentication, one handler file per resource.

May import: control and what control may import.
Begin with app.py, then routes.py.
"""
