"""Pure deciders about models that both planes need."""
