"""Convert word processor documents, e-books, web pages and PDFs to text, in a separate process."""
