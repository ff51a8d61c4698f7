--- The colours of scenes by name: those that objects are tinted with and, softer, those of backgrounds.
local M = {}

--- What an object is recoloured with, { name, red, green, blue }.
M.tints = {
  { "red", 222, 36, 36 },
  { "orange", 246, 130, 16 },
  { "yellow", 250, 214, 28 },
  { "green", 44, 160, 56 },
  { "blue", 40, 96, 220 },
  { "purple", 138, 58, 190 },
  { "pink", 250, 128, 180 },
  { "gray", 132, 135, 140 },
}

M.backgrounds = {
  { "white", 250, 250, 248 },
  { "black", 26, 26, 30 },
  { "gray", 172, 174, 178 },
  { "red", 206, 66, 62 },
  { "orange", 246, 168, 92 },
  { "yellow", 250, 228, 128 },
  { "green", 122, 190, 112 },
  { "blue", 100, 156, 228 },
  { "purple", 168, 126, 206 },
  { "pink", 250, 190, 208 },
  { "brown", 142, 104, 76 },
  { "turquoise", 96, 204, 198 },
}

M.tint, M.background = {}, {} -- position by name
for i, row in ipairs(M.tints) do M.tint[row[1]] = i end
for i, row in ipairs(M.backgrounds) do M.background[row[1]] = i end

return M
