// Functions of the op table.
