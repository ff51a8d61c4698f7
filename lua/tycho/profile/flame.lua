--- Profiles as flame graphs. Gregg 2016, "The Flame Graph". The bottom row is the whole function; above it forward and
-- backward pass, then the modules from the outermost in, then ops. Parts of a row are in the order they first ran.
local core = require "tycho.core"
local arguments = require "tycho.arguments"

local row, character = 18, 6.6 -- pixels: height of a row, width of a letter

local function escape(text)
  return (text:gsub("[&<>\"]", { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;" }))
end

local function child(node, name, kind)
  local found = node.by[name]
  if not found then
    found = { name = name, kind = kind, seconds = 0.0, calls = 0, by = {}, list = {} }
    node.by[name] = found
    table.insert(node.list, found)
  end
  return found
end

-- The tree of a profile: names of modules are cut at their points.
local function tree_of(self)
  local root = { name = "all", kind = "pass", seconds = self.seconds, calls = 1, by = {}, list = {} }
  for _, e in ipairs(self.events) do
    local stack = { child(root, e.backward and "backward" or "forward", "pass") }
    if e.module then
      for part in e.module:gmatch "[^.]+" do stack[#stack + 1] = child(stack[#stack], part, "module") end
    end
    stack[#stack + 1] = child(stack[#stack], (e.fused and "fused " or "") .. e.op, "op")
    for _, node in ipairs(stack) do node.seconds, node.calls = node.seconds + e.seconds, node.calls + 1 end
  end
  return root
end

local function depth_of(node)
  local deepest = 0
  for _, inner in ipairs(node.list) do deepest = math.max(deepest, depth_of(inner)) end
  return deepest + 1
end

-- A colour of hue (degrees), saturation and lightness as #rrggbb: not every viewer knows hsl().
local function rgb(hue, saturation, lightness)
  local reach = saturation * math.min(lightness, 1 - lightness)
  local function channel(n)
    local k = (n + hue / 30) % 12
    return math.floor(255 * (lightness - reach * math.max(-1, math.min(k - 3, 9 - k, 1))) + 0.5)
  end
  return ("#%02x%02x%02x"):format(channel(0), channel(8), channel(4))
end

-- A colour by what a part is and by its name, so that the same op looks the same everywhere.
local function colour_of(node)
  local sum = 0
  for i = 1, #node.name do sum = (sum * 31 + node.name:byte(i)) % 997 end
  local hue = ({ pass = 215, module = 95, op = 5 })[node.kind] + sum % 45
  return rgb(hue, node.kind == "op" and 0.75 or 0.45, 0.62 + sum % 14 / 100)
end

---@param self Profile
---@param path string
---@param options? { width?: integer }
---@return string path
return function(self, path, options)
  arguments.expect("Profile:flame", "path", path, "a string")
  local o = arguments.read("Profile:flame", options, { width = 1200 }, { width = "an integer in [200, 20000]" })
  local root = tree_of(self)
  local height = depth_of(root) * row + 2 * row
  local parts = { ('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" '
    .. 'font-family="monospace" font-size="11">'):format(o.width, height, o.width, height),
    '<rect width="100%" height="100%" fill="white"/>' }
  local whole = math.max(self.seconds, 1e-12)
  local function draw(node, x, level)
    local width = node.seconds / whole * o.width
    if width < 0.3 then return end
    local y = height - (level + 1) * row - row // 2
    local label = ("%s: %.3f ms, %.1f %%, %d kernels"):format(node.name, node.seconds * 1e3, 100 * node.seconds / whole,
      node.calls)
    parts[#parts + 1] = ('<g><title>%s</title><rect x="%.2f" y="%d" width="%.2f" height="%d" fill="%s"/>'):format(
      escape(label), x, y, math.max(width - 0.5, 0.3), row - 1, colour_of(node))
    local room = math.floor((width - 6) / character)
    if room >= 2 then
      local text = #node.name <= room and node.name or node.name:sub(1, room - 1) .. "…"
      parts[#parts + 1] = ('<text x="%.2f" y="%d">%s</text>'):format(x + 3, y + row - 5, escape(text))
    end
    parts[#parts + 1] = "</g>"
    for _, inner in ipairs(node.list) do
      draw(inner, x, level + 1)
      x = x + inner.seconds / whole * o.width
    end
  end
  draw(root, 0, 0)
  parts[#parts + 1] = "</svg>\n"
  core.io.write_atomic(path, table.concat(parts, "\n"))
  return path
end
