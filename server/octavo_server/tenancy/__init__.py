"""Who is who: the keys that keep namespaces apart."""
