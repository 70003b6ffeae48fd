"""The selector by hand: what it keeps, what it replaces, what follows from that, and that untrained it changes nothing."""
