"""Who holds what, and what must therefore be sent or summed. Pure: no torch, no store, no clock."""
