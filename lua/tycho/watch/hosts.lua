--- Whether a server may answer a request by the name of its host. A page of another origin can make a name of its own
-- lead to this machine, but not change what the browser sends as the host: only names that are ours are answered.
-- Addresses are no names.
---@param host any  the header
---@param own string  the name that the server was given
---@return boolean
return function(host, own)
  if type(host) ~= "string" then return false end
  local name = host:lower():match "^(%[[%x:.]+%])$" or host:lower():match "^(%[[%x:.]+%]):%d+$"
    or host:lower():match "^([^:]*):?%d*$"
  if name == "localhost" or name == "127.0.0.1" or name == "[::1]" then return true end
  if own == "0.0.0.0" or own == "::" then
    return name ~= nil and (name:find "^%d+%.%d+%.%d+%.%d+$" ~= nil or name:sub(1, 1) == "[")
  end
  return name == own or name == "[" .. own .. "]"
end
