"""The core: everything that must be right for a stated ε to be true. It imports nothing above itself."""
