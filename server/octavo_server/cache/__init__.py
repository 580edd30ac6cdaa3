"""The page cache: which pages this node holds, where, and who may read or fill them."""
