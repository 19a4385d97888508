"""`hive top`: the whole box on one screen. Only that command imports this room, and Textual with it.

May import: leaves, client, the store's viewer.
Begin with app.py.
"""
