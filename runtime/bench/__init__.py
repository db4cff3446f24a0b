"""What `./run bench` measures: each module is one benchmark, over real worker processes."""
