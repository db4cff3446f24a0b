"""What people would use instead, measured on the same work. Worker programs import the peers; the
rest of the package, and every other part of the runtime, does not know them."""
