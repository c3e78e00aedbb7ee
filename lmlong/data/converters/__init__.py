"""Files of word processors, e-books, web pages and PDFs -> text, in a process of its own."""
