--- What the programs of bench/ share of reading their command lines.
local command_line = {}

--- Ends the program with a message, as a wrong use does.
---@param text string  a format
function command_line.stop(text, ...)
  io.stderr:write("bench: ", text:format(...), "\n")
  os.exit(2, true)
end

--- Prints what the head of a program says of its use, to the end of the paragraph with its options, and ends it.
---@param path string  the program's file
function command_line.help(path)
  local options = false
  for line in io.lines(path) do
    local text = line:match "^%-%-%-? ?(.*)"
    options = options or text and text:find("options:", 1, true)
    if not text or options and text == "" then break end
    print(text)
  end
  os.exit(0, true)
end

--- Whether a name begins with one of the prefixes; every name does without prefixes.
---@param prefixes string[]
---@param name string
---@return boolean
function command_line.wanted(prefixes, name)
  for _, prefix in ipairs(prefixes) do
    if name:sub(1, #prefix) == prefix then return true end
  end
  return #prefixes == 0
end

return command_line
