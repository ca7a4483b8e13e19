"""The policies: a request and the views of the pods go in, a pod comes out. Pure."""
