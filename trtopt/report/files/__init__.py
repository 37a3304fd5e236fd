"""Reports as Markdown, CSV, JUnit and traces."""
