"""Where observations come from: one port, one leaf a source, each optional."""
