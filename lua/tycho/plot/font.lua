--- A bitmap font for ASCII 32 to 126, 5 pixels wide: seven rows of five bits per character, the left pixel highest, and
-- two more below the baseline for those that descend.
local rows = {
  [" "] = "00000000000000", ["!"] = "04040404000004", ['"'] = "0A0A0A00000000", ["#"] = "0A0A1F0A1F0A0A",
  ["$"] = "040F140E051E04", ["%"] = "18190204081303", ["&"] = "0C12140815120D", ["'"] = "0C040800000000",
  ["("] = "02040808080402", [")"] = "08040202020408", ["*"] = "0004150E150400", ["+"] = "0004041F040400",
  [","] = "00000000000C0408", ["-"] = "0000001F000000", ["."] = "00000000000C0C", ["/"] = "00010204081000",
  ["0"] = "0E11131519110E", ["1"] = "040C040404040E", ["2"] = "0E11010204081F", ["3"] = "1F02040201110E",
  ["4"] = "02060A121F0202", ["5"] = "1F101E0101110E", ["6"] = "0608101E11110E", ["7"] = "1F010204080808",
  ["8"] = "0E11110E11110E", ["9"] = "0E11110F01020C", [":"] = "000C0C000C0C00", [";"] = "000C0C00000C0408",
  ["<"] = "02040810080402", ["="] = "00001F001F0000", [">"] = "08040201020408", ["?"] = "0E110102040004",
  ["@"] = "0E11010D15150E", A = "0E11111F111111", B = "1E11111E11111E", C = "0E11101010110E", D = "1C12111111121C",
  E = "1F10101E10101F", F = "1F10101E101010", G = "0E11101711110F", H = "1111111F111111", I = "0E04040404040E",
  J = "0702020202120C", K = "11121418141211", L = "1010101010101F", M = "111B1515111111", N = "11111915131111",
  O = "0E11111111110E", P = "1E11111E101010", Q = "0E11111115120D", R = "1E11111E141211", S = "0F10100E01011E",
  T = "1F040404040404", U = "1111111111110E", V = "11111111110A04", W = "1111111515150A", X = "11110A040A1111",
  Y = "1111110A040404", Z = "1F01020408101F", ["["] = "0E08080808080E", ["\\"] = "00100804020100",
  ["]"] = "0E02020202020E", ["^"] = "040A1100000000", ["_"] = "000000000000001F", ["`"] = "08040200000000",
  a = "00000E010F110F", b = "1010161911111E", c = "00000E1010110E", d = "01010D1311110F", e = "00000E111F100E",
  f = "0609081C080808", g = "00000F1111110F010E", h = "10101619111111", i = "04000C0404040E", j = "02000602020202120C",
  k = "10101214181412", l = "0C04040404040E", m = "00001A15151111", n = "00001619111111", o = "00000E1111110E",
  p = "0000161911111E1010", q = "00000D1311110F0101", r = "00001619101010", s = "00000E100E011E", t = "08081C08080906",
  u = "0000111111130D", v = "00001111110A04", w = "0000111115150A", x = "0000110A040A11", y = "0000111111110F010E",
  z = "00001F0204081F", ["{"] = "02040408040402", ["|"] = "04040404040404", ["}"] = "08040402040408",
  ["~"] = "00000815020000",
}

local font = { width = 5, height = 7, depth = 2, advance = 6 } -- height above the baseline, depth below
local decoded = {}

--- The nine rows of a character as numbers; others than ASCII look like "?".
function font.glyph(character)
  local glyph = decoded[character]
  if not glyph then
    local digits = rows[character] or rows["?"]
    glyph = {}
    for i = 1, font.height + font.depth do glyph[i] = tonumber(digits:sub(2 * i - 1, 2 * i), 16) or 0 end
    decoded[character] = glyph
  end
  return glyph
end

--- Width of a text in pixels at `scale`.
function font.text_width(text, scale)
  return #text == 0 and 0 or (#text * font.advance - 1) * scale
end

--- Calls set(x, y) for every pixel of the text whose top left corner is (x, y).
function font.draw(text, x, y, scale, set)
  for i = 1, #text do
    local glyph = font.glyph(text:sub(i, i))
    local left = x + (i - 1) * font.advance * scale
    for row = 1, font.height + font.depth do
      local bits = glyph[row]
      for column = 0, 4 do
        if bits & (16 >> column) ~= 0 then
          for dy = 0, scale - 1 do
            for dx = 0, scale - 1 do set(left + column * scale + dx, y + (row - 1) * scale + dy) end
          end
        end
      end
    end
  end
end

return font
