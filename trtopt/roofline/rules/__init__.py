"""What makes a layer slow, and what would make it faster: one function per rule, its page in its docstring."""
