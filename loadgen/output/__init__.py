"""Results for people and for programs: terminal, JSON, CSV, Markdown, HTML, PNG."""
