"""How proxy, daemon and helper talk: one framed, two-way connection over AF_UNIX that can carry descriptors."""
