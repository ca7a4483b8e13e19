"""The subcommands: settings in, result out."""
