"""The messages on the wire, generated from `picker.proto` by `make protos`."""
