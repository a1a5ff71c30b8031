"""What a module keeps of earlier tokens to answer the next one."""
